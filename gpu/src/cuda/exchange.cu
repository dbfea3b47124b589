// Exchanges bytes among the devices of several processes, and reduces them on the way. Each process
// launches it for its device, at the same number of an exchange; the devices wait for each other.
//
// exchange.ptx is this file, compiled:
//   nvcc -O3 -ptx -arch=compute_75 exchange.cu -o exchange.ptx
// with the version lowered to the first one that has all of its instructions, which older drivers read.

typedef unsigned char byte;
typedef unsigned int u32;
typedef unsigned long long u64;

// The most devices of an exchange.
#define RANKS 16
// The most blocks of a launch.
#define BLOCKS 256

// Bytes to copy, by chunks. A place is a buffer of all bytes, or a stage: that has space for two chunks.
struct Piece {
    const byte *from;
    byte *to;
    u64 bytes;
    u64 chunk;
    u32 is_from_staged, is_to_staged;
};

struct Exchange {
    u32 ranks, rank;
    // Larger than that of the exchange before; wraps.
    u32 number;
    u32 data_type, op;
    // How many results are stored, and whether they are copied by other devices afterwards.
    u32 results_count, has_second_phase;
    // Bits of sources and of results that are stages.
    u32 staged_sources, staged_results;
    // Each has a number of its own, from that of the exchange on.
    u32 chunks;
    u32 unused;
    // From the space of even numbers in a stage to that of odd ones.
    u64 stage_distance;
    // Words of this device, which the others write, and of each other device.
    u32 *own_words;
    u32 *words[RANKS];
    // Not 0: the exchange is given up. In memory of the host.
    const u32 *stop;
    // Written if the exchange was given up.
    u32 *failed;
    // Copied first: to the memory of other devices.
    Piece pushes[RANKS];
    // Reduced when all have pushed, in this order.
    const byte *sources[RANKS];
    byte *results[RANKS];
    u64 reduced_bytes, reduced_chunk;
    // Copied last, when all have pushed or stored their results.
    Piece copies[RANKS];
};

__device__ __forceinline__ uint4 load(const uint4 *from) {
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

// The part of this block of a chunk: from begin to end. The last chunk of a buffer is divided as the others
// are: a block writes to a stage where it did two chunks before.
__device__ __forceinline__ void share(u64 chunk, u64 length, u64 *begin, u64 *end) {
    u64 units = (chunk + 15) / 16;
    u64 each = (units + gridDim.x - 1) / gridDim.x * 16;
    *begin = min(each * blockIdx.x, length);
    *end = min(*begin + each, length);
}

// What is different for each chunk.
struct Chunk {
    u32 index;
    u64 stage_offset;
};

template <typename P> __device__ __forceinline__ P *place(P *base, bool is_staged, u64 chunk, const Chunk &c) {
    return base + (is_staged ? c.stage_offset : chunk * c.index);
}

// Copies the part of this block.
__device__ void copy(const Piece &piece, const Chunk &c) {
    u64 before = piece.chunk * c.index;
    if (before >= piece.bytes) return;
    u64 begin, end;
    share(piece.chunk, min(piece.bytes - before, piece.chunk), &begin, &end);
    const byte *from = place(piece.from, piece.is_from_staged, piece.chunk, c);
    byte *to = place(piece.to, piece.is_to_staged, piece.chunk, c);
    u64 places = (u64)from | (u64)to;
    u64 at = begin;
    if (places % 16 == 0) {
        u64 units = (end - begin) / 16, stride = blockDim.x;
        const uint4 *f = (const uint4 *)(from + begin);
        uint4 *t = (uint4 *)(to + begin);
        u64 i = threadIdx.x;
        for (; i + 3 * stride < units; i += 4 * stride) {
            uint4 a = load(f + i), b = load(f + i + stride);
            uint4 c = load(f + i + 2 * stride), d = load(f + i + 3 * stride);
            t[i] = a;
            t[i + stride] = b;
            t[i + 2 * stride] = c;
            t[i + 3 * stride] = d;
        }
        for (; i < units; i += stride) t[i] = load(f + i);
        at = begin + units * 16;
    } else if (places % 4 == 0) {
        u64 units = (end - begin) / 4, stride = blockDim.x;
        const volatile u32 *f = (const volatile u32 *)(from + begin);
        u32 *t = (u32 *)(to + begin);
        u64 i = threadIdx.x;
        for (; i + 3 * stride < units; i += 4 * stride) {
            u32 a = f[i], b = f[i + stride], c = f[i + 2 * stride], d = f[i + 3 * stride];
            t[i] = a;
            t[i + stride] = b;
            t[i + 2 * stride] = c;
            t[i + 3 * stride] = d;
        }
        for (; i < units; i += stride) t[i] = f[i];
        at = begin + units * 4;
    }
    for (at += threadIdx.x; at < end; at += blockDim.x) to[at] = *(const volatile byte *)(from + at);
}

// Waits until the same block of all other devices is here. Returns false if the exchange was given up.
__device__ bool meet(const Exchange &e, u32 phase, u32 number, int *given_up) {
    __syncthreads();
    u32 other = threadIdx.x;
    if (other < e.ranks && other != e.rank) {
        u32 at = (phase * BLOCKS + blockIdx.x) * RANKS;
        __threadfence_system();
        asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(e.words[other] + at + e.rank),
                     "r"(number)
                     : "memory");
        const u32 *word = e.own_words + at + other;
        for (u32 looks = 0;; looks++) {
            u32 found;
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(found) : "l"(word) : "memory");
            if ((int)(found - number) >= 0) break;
            if (looks % 4096 == 4095 && *(const volatile u32 *)e.stop != 0) {
                *given_up = 1;
                break;
            }
        }
    }
    __syncthreads();
    return *(volatile int *)given_up == 0;
}

enum { SUM = 1, PRODUCT, MIN, MAX, MEAN };

// Combines several elements of two ranks. A NaN of either is the result.
template <int COUNT, typename A> __device__ __forceinline__ void combine(u32 op, A *a, const A *b) {
    switch (op) {
    case PRODUCT:
#pragma unroll
        for (int i = 0; i < COUNT; i++) a[i] = a[i] * b[i];
        break;
    case MIN:
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            a[i] = a[i] != a[i] ? a[i] : (b[i] < a[i] || b[i] != b[i]) ? b[i] : a[i];
        break;
    case MAX:
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            a[i] = a[i] != a[i] ? a[i] : (a[i] < b[i] || b[i] != b[i]) ? b[i] : a[i];
        break;
    default:
#pragma unroll
        for (int i = 0; i < COUNT; i++) a[i] = a[i] + b[i];
    }
}

// How elements are loaded, accumulated and stored.
template <typename T> struct Plain {
    typedef T Stored;
    typedef T Sum;
    static __device__ Sum widen(Stored v) { return v; }
    static __device__ Stored narrow(Sum v) { return v; }
    static __device__ Sum divide(Sum v, u32 n) { return v / (Sum)n; }
};

// Sums of small integers wrap as their type does.
template <typename T> struct Small {
    typedef T Stored;
    typedef T Sum;
    static __device__ Sum widen(Stored v) { return v; }
    static __device__ Stored narrow(Sum v) { return v; }
    static __device__ Sum divide(Sum v, u32 n) { return (T)((int)v / (int)n); }
};

struct Half {
    typedef unsigned short Stored;
    typedef float Sum;
    static __device__ Sum widen(Stored v) {
        float f;
        asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
        return f;
    }
    static __device__ Stored narrow(Sum v) {
        unsigned short h;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(v));
        return h;
    }
    static __device__ Sum divide(Sum v, u32 n) { return __fdiv_rn(v, (float)n); }
};

struct Bfloat {
    typedef unsigned short Stored;
    typedef float Sum;
    static __device__ Sum widen(Stored v) { return __uint_as_float((u32)v << 16); }
    static __device__ Stored narrow(Sum v) {
        u32 bits = __float_as_uint(v);
        if (v != v) return 0x7fff;
        // To the nearest, ties to even.
        return (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
    static __device__ Sum divide(Sum v, u32 n) { return __fdiv_rn(v, (float)n); }
};

// The sources and results of a chunk.
struct Places {
    const byte *sources[RANKS];
    byte *results[RANKS];
};

template <typename E>
__device__ __forceinline__ void reduce_element(const Exchange &e, const Places &p, u64 at) {
    typedef typename E::Stored Stored;
    typename E::Sum sum = E::widen(*(const volatile Stored *)(p.sources[0] + at));
    for (u32 r = 1; r < e.ranks; r++) {
        typename E::Sum next = E::widen(*(const volatile Stored *)(p.sources[r] + at));
        combine<1>(e.op, &sum, &next);
    }
    if (e.op == MEAN) sum = E::divide(sum, e.ranks);
    for (u32 r = 0; r < e.results_count; r++) 
        *(Stored *)(p.results[r] + at) = E::narrow(sum);
}

// Sixteen bytes of each source.
template <typename E>
__device__ __forceinline__ void reduce_unit(const Exchange &e, const Places &p, u64 at) {
    typedef typename E::Stored Stored;
    const int count = 16 / sizeof(Stored);
    union {
        uint4 vector;
        Stored elements[count];
    } unit;
    typename E::Sum sums[count];
    unit.vector = load((const uint4 *)(p.sources[0] + at));
#pragma unroll
    for (int i = 0; i < count; i++) sums[i] = E::widen(unit.elements[i]);
    for (u32 r = 1; r < e.ranks; r++) {
        typename E::Sum next[count];
        unit.vector = load((const uint4 *)(p.sources[r] + at));
#pragma unroll
        for (int i = 0; i < count; i++) next[i] = E::widen(unit.elements[i]);
        combine<count>(e.op, sums, next);
    }
    if (e.op == MEAN) {
#pragma unroll
        for (int i = 0; i < count; i++) sums[i] = E::divide(sums[i], e.ranks);
    }
#pragma unroll
    for (int i = 0; i < count; i++) unit.elements[i] = E::narrow(sums[i]);
    for (u32 r = 0; r < e.results_count; r++) *(uint4 *)(p.results[r] + at) = unit.vector;
}

template <typename E> __device__ void reduce(const Exchange &e, const Places &p, const Chunk &c) {
    u64 before = e.reduced_chunk * c.index;
    if (before >= e.reduced_bytes) return;
    u64 begin, end, places = 0;
    share(e.reduced_chunk, min(e.reduced_bytes - before, e.reduced_chunk), &begin, &end);
    for (u32 r = 0; r < e.ranks; r++) places |= (u64)p.sources[r];
    for (u32 r = 0; r < e.results_count; r++) places |= (u64)p.results[r];
    u64 at = begin;
    if (places % 16 == 0) {
        u64 units = (end - begin) / 16;
        for (u64 i = threadIdx.x; i < units; i += blockDim.x) reduce_unit<E>(e, p, begin + i * 16);
        at = begin + units * 16;
    }
    const u64 size = sizeof(typename E::Stored);
    for (at += threadIdx.x * size; at < end; at += blockDim.x * size) reduce_element<E>(e, p, at);
}

extern "C" __global__ void __launch_bounds__(512) exchange(const __grid_constant__ Exchange e) {
    __shared__ int given_up;
    __shared__ Places p;
    if (threadIdx.x == 0) given_up = 0;
    Chunk c;
    for (c.index = 0; c.index < e.chunks; c.index++) {
        u32 number = e.number + c.index;
        c.stage_offset = (number & 1) * e.stage_distance;
        // No thread needs those of the chunk before. They are read after the wait for the others.
        __syncthreads();
        for (u32 r = threadIdx.x; r < RANKS; r += blockDim.x) {
            p.sources[r] = place(e.sources[r], e.staged_sources >> r & 1, e.reduced_chunk, c);
            p.results[r] = place(e.results[r], e.staged_results >> r & 1, e.reduced_chunk, c);
        }
        for (u32 r = 0; r < e.ranks; r++) copy(e.pushes[r], c);
        if (!meet(e, 0, number, &given_up)) break;
        switch (e.reduced_bytes > 0 ? e.data_type : 0) {
        case 1: reduce<Small<unsigned char>>(e, p, c); break;
        case 2: reduce<Small<signed char>>(e, p, c); break;
        case 3: reduce<Small<unsigned short>>(e, p, c); break;
        case 4: reduce<Small<short>>(e, p, c); break;
        case 5: reduce<Plain<u32>>(e, p, c); break;
        case 6: reduce<Plain<int>>(e, p, c); break;
        case 7: reduce<Plain<u64>>(e, p, c); break;
        case 8: reduce<Plain<long long>>(e, p, c); break;
        case 9: reduce<Half>(e, p, c); break;
        case 10: reduce<Bfloat>(e, p, c); break;
        case 11: reduce<Plain<float>>(e, p, c); break;
        case 12: reduce<Plain<double>>(e, p, c); break;
        }
        if (e.has_second_phase && !meet(e, 1, number, &given_up)) break;
        for (u32 r = 0; r < e.ranks; r++) copy(e.copies[r], c);
    }
    if (given_up && threadIdx.x == 0) *e.failed = e.number;
}
