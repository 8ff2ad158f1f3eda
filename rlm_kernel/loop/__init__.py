"""loop layer; see docs/architecture.md."""
