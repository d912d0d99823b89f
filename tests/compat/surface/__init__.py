"""Opacus's public surface beside ours: every name and signature, why some differ, and scripts run with both."""
