"""wire layer; see docs/architecture.md."""
