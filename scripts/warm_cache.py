"""The former name of `luceasync warm`."""

import sys

from luceasync.cli.app import main

if __name__ == "__main__":
    sys.argv.insert(1, "warm")
    main()
