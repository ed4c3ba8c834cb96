"""``python -m gaupipe`` and ``torchrun -m gaupipe`` are the command ``gaupipe``."""

import os
import sys

from gaupipe.system.imports import refuse_namesakes

# Python puts the current folder first on the path of modules: a store.py there would be taken for
# the package store. The command gaupipe does not look there either.
if not sys.flags.safe_path and sys.path[:1] in ([""], [os.getcwd()]):
    del sys.path[0]
refuse_namesakes()

if __name__ == "__main__":
    from stages.cli import main

    main()
