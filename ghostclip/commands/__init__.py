"""Commands of ``ghostclip``, light to import until they run.

Of each there is a table of options, and a function ``run_...`` that does the job with what was given and returns the
exit status; its docstring is what ``--help`` says.
"""
