"""Scripts, names and behaviour of Opacus, beside ours."""
