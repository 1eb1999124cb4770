"""Files and programs that bench_quantised measures with."""
