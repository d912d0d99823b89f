"""Tests of the command line: ``ghostclip finetune`` on real files, right and wrong."""
