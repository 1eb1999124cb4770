#pragma once
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* for dl_iterate_phdr */
#endif
/* Divides work among the threads that torch has already started. Finds the OpenMP runtime in the running
   process instead of linking to one: a second runtime would spin against the first. */
#include <stdint.h>
#include <string.h>

typedef void (*Task)(void *context, int64_t begin, int64_t end);

typedef struct {
    Task task;
    void *context;
    int64_t count, grain, next;
} Region;

typedef struct {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
    int (*max_threads)(void);
    int (*in_parallel)(void);
} Threads;

#if defined(__linux__)
#include <dlfcn.h>
#include <link.h>

static int threads_found(struct dl_phdr_info *info, size_t size, void *to) {
    (void)size;
    const char *path = info->dlpi_name, *name = strrchr(path, '/');
    name = name ? name + 1 : path;
    if (strncmp(name, "libgomp", 7) && strncmp(name, "libomp", 6) && strncmp(name, "libiomp", 7))
        return 0;
    void *library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
    if (!library) return 0;
    Threads *threads = (Threads *)to;
    *(void **)&threads->parallel = dlsym(library, "GOMP_parallel");
    *(void **)&threads->max_threads = dlsym(library, "omp_get_max_threads");
    *(void **)&threads->in_parallel = dlsym(library, "omp_in_parallel");
    dlclose(library);
    return threads->parallel && threads->max_threads && threads->in_parallel;
}

static Threads find_threads(void) {
    Threads found = {0};
    if (!dl_iterate_phdr(threads_found, &found)) memset(&found, 0, sizeof found);
    return found;
}
#else
static Threads find_threads(void) { return (Threads){0}; }
#endif

static void threads_run(void *region) {
    Region *all = (Region *)region;
    int64_t begin;
    while ((begin = __atomic_fetch_add(&all->next, all->grain, __ATOMIC_RELAXED)) < all->count) {
        int64_t end = begin + all->grain;
        all->task(all->context, begin, end < all->count ? end : all->count);
    }
}

/* The runtime of the process; two threads that look it up at once find the same. */
static const Threads *threads_of_torch(void) {
    static Threads threads;
    static int is_found;
    if (!__atomic_load_n(&is_found, __ATOMIC_ACQUIRE)) {
        threads = find_threads();
        __atomic_store_n(&is_found, 1, __ATOMIC_RELEASE);
    }
    return &threads;
}

/* The number of threads of the calling one, as set by torch.set_num_threads. */
static int parallel_width(void) {
    const Threads *threads = threads_of_torch();
    return threads->parallel && !threads->in_parallel() ? threads->max_threads() : 1;
}

/* Run [0, count) in parts of `grain`, taken by any free thread. */
static void parallel_for(Task task, void *context, int64_t count, int64_t grain) {
    int64_t parts = (count + grain - 1) / grain, num_threads = parallel_width();
    if (num_threads > parts) num_threads = parts;
    if (num_threads <= 1) {
        if (count > 0) task(context, 0, count);
        return;
    }
    Region region = {task, context, count, grain, 0};
    threads_of_torch()->parallel(threads_run, &region, (unsigned)num_threads, 0);
}
