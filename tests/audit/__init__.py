"""What a release reveals: the audit's own statistics, and the audit of this library, cheap checks first."""
