"""What `make_private` puts together: model, clipper, optimizer and loader, once their options are checked."""
