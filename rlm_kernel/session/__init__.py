"""Session layer: joins children, environment, loop and clients; usable without Jupyter. See docs/architecture.md."""
