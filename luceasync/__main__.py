"""python -m luceasync"""

from luceasync.cli.app import main

if __name__ == "__main__":
    main()
