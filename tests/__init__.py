"""Tests of ghostclip; a package, so that tests share the table of cases and the slow reference by import."""
