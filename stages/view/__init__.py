"""View: attention maps in a browser, served from this machine or as a page of a few images.

serve -> {app, page} -> viewer -> gallery
"""

from stages.view.serve import run

__all__ = ["run"]
