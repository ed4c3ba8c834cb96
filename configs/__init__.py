"""The shipped settings files; a package (``gaupipe.configs``) so that an installed gaupipe finds
them."""
