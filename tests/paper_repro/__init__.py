"""The programs that measure published tables again: their models, their command line, and what they refuse."""
