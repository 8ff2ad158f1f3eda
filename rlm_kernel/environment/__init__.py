"""environment layer; see docs/architecture.md."""
