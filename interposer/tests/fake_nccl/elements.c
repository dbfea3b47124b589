/* Elements of all types as numbers. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "nccl.h"

static const unsigned char lengths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1};

size_t element_bytes(ncclDataType_t type) { return lengths[type]; }

/* Numbers of 16 bits with this many bits of mantissa: half precision has 10, bfloat16 has 7. */
static double number_of(uint16_t bits, int mantissa) {
    int exponent = (bits & 0x7fff) >> mantissa, bias = (1 << (14 - mantissa)) - 1;
    double fraction = bits & ((1 << mantissa) - 1);
    double value = exponent == 0 ? ldexp(fraction, 1 - bias - mantissa)
                                 : ldexp(fraction + (1 << mantissa), exponent - bias - mantissa);
    return bits & 0x8000 ? -value : value;
}

static uint16_t bits_of(double value, int mantissa) {
    if (value == 0) return 0;
    int exponent, bias = (1 << (14 - mantissa)) - 1;
    double fraction = frexp(fabs(value), &exponent);
    uint16_t bits = (uint16_t)nearbyint(ldexp(fraction, mantissa + 1)) - (1 << mantissa);
    return (uint16_t)((exponent - 1 + bias) << mantissa) + bits + (value < 0 ? 0x8000 : 0);
}

double element_get(ncclDataType_t type, const void *all, size_t at) {
    switch (type) {
        case ncclInt8: return ((const int8_t *)all)[at];
        case ncclInt32: return ((const int32_t *)all)[at];
        case ncclUint32: return ((const uint32_t *)all)[at];
        case ncclInt64: return (double)((const int64_t *)all)[at];
        case ncclUint64: return (double)((const uint64_t *)all)[at];
        case ncclFloat16: return number_of(((const uint16_t *)all)[at], 10);
        case ncclFloat32: return ((const float *)all)[at];
        case ncclFloat64: return ((const double *)all)[at];
        case ncclBfloat16: return number_of(((const uint16_t *)all)[at], 7);
        default: return ((const uint8_t *)all)[at];
    }
}

void element_put(ncclDataType_t type, void *all, size_t at, double value) {
    switch (type) {
        case ncclInt8: ((int8_t *)all)[at] = (int8_t)value; break;
        case ncclInt32: ((int32_t *)all)[at] = (int32_t)value; break;
        case ncclUint32: ((uint32_t *)all)[at] = (uint32_t)value; break;
        case ncclInt64: ((int64_t *)all)[at] = (int64_t)value; break;
        case ncclUint64: ((uint64_t *)all)[at] = (uint64_t)value; break;
        case ncclFloat16: ((uint16_t *)all)[at] = bits_of(value, 10); break;
        case ncclFloat32: ((float *)all)[at] = (float)value; break;
        case ncclFloat64: ((double *)all)[at] = value; break;
        case ncclBfloat16: ((uint16_t *)all)[at] = bits_of(value, 7); break;
        default: ((uint8_t *)all)[at] = (uint8_t)value; break;
    }
}
