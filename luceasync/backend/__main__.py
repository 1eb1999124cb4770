"""python -m luceasync.backend"""

from luceasync.backend.app import main

if __name__ == "__main__":
    main()
