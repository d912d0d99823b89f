"""Plans of many devices, made from shapes alone."""
