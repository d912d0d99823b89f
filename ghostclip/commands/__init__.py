"""The jobs of the ``ghostclip`` command that are one module each.

Every module has ``add_arguments(parser)``, light to import, and ``run(given) -> exit status``.
"""
