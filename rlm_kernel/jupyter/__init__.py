"""jupyter layer; see docs/architecture.md."""
