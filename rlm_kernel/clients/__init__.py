"""Model clients: how a prompt becomes a completion. Import from the modules; this file re-exports nothing."""
