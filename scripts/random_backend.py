"""luceasync-backend for models of random weights; see luceasync.bench.random_weights."""

from luceasync.backend.app import main
from luceasync.bench.random_weights import know_it

if __name__ == "__main__":
    know_it()
    main()
