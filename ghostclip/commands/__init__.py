"""Commands of ``ghostclip`` that are one module each.

A module's docstring is what ``--help`` says, its ``OPTIONS`` are the keywords of argparse by option, and its
``run(given)`` does the job and returns the exit status. All are light to import until they run.
"""
