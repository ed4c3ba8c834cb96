"""Teachers of phase A, a file each: what they give, and how they are trained."""
