"""Opacus's public surface beside ours: every module, name and signature, and why the ones that differ do."""
