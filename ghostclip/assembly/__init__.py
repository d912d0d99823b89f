"""Assembly of what `make_private` returns: model, clipper, optimizer and loader, once their options are checked."""
