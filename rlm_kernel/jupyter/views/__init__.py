"""What people see: each view is plain text for terminals and escaped HTML for notebooks, in one bundle."""
