"""`python -m moesaic` is the `moesaic` command."""

import sys

from moesaic.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
