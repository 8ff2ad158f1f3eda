"""children layer; see docs/architecture.md."""
