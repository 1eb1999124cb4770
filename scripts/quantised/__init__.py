"""Files and programs that bench_quantised_cpu and check_llama_cpp work with."""
