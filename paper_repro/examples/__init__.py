"""The trainings that people start private learning from, small: `python -m paper_repro.examples` lists and runs them.

Each is one file, written as a script for Opacus is written, with `ghostclip` in the imports; it makes or finds its data
on the machine and takes less than a minute on one core.
"""
