"""Files and programs that bench_quantised_cpu measures with."""
