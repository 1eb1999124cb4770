"""Other ends of hops and chunks, and models in several processes, as measurements want them."""
