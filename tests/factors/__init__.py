"""Every operation on every factor against its materialised twin."""
