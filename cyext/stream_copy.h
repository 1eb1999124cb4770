#pragma once
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

/* memcpy that bypasses the cache for large copies: whole lines need not be read before they are written,
   and the source stays cached for its checksum. */
static void stream_copy(char *to, const char *from, size_t num_bytes) {
#if defined(__SSE2__)
    if (num_bytes >= 256 * 1024) {
        size_t head = -(size_t)to % 64;
        memcpy(to, from, head);
        to += head, from += head, num_bytes -= head;
        for (; num_bytes >= 64; to += 64, from += 64, num_bytes -= 64) {
            const __m128i *line = (const __m128i *)from;
            __m128i a = _mm_loadu_si128(line), b = _mm_loadu_si128(line + 1);
            __m128i c = _mm_loadu_si128(line + 2), d = _mm_loadu_si128(line + 3);
            _mm_stream_si128((__m128i *)to, a);
            _mm_stream_si128((__m128i *)to + 1, b);
            _mm_stream_si128((__m128i *)to + 2, c);
            _mm_stream_si128((__m128i *)to + 3, d);
        }
        _mm_sfence();  /* streaming stores are not ordered with others */
    }
#endif
    memcpy(to, from, num_bytes);
}
