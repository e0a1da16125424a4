// cuBLASLt without a GPU: the functions that eaglet calls, with the products computed on the CPU from the very same
// descriptors.
//
//   g++ -std=c++17 -O2 -shared -fPIC -Wl,-soname,libcublasLt.so.12 cublaslt.cpp -o libcublasLt.so.12
//
// It is stricter than cuBLASLt: an algorithm may only be used for the types, widths, strides and alignments that it was
// chosen for (the number of rows of the transposed result may differ, and some of its columns may be asked for), and must
// be used with a workspace that is large enough and aligned.
//
// Of products of depth 13 it takes an algorithm only for the outputs that it was chosen for, as a GPU may.
//
// EAGLET_STANDIN_FAULT=product:N makes the N-th product fail.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

namespace {

enum Status { SUCCESS = 0, INVALID_VALUE = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15 };
enum Type { F32 = 0, BF16 = 14 };
enum { COMPUTE_32F = 68 };
const size_t WORKSPACE = 1 << 20;
const uint32_t CHOOSY_DEPTH = 13;

struct Layout {
    int type;
    uint64_t rows, cols;
    int64_t stride;
};
struct Desc {
    int compute, scale;
    int transposed[2];
};
struct Preference {
    uint64_t workspace;
    uint32_t reduction_mask;
    uint32_t alignment[4];
};
// What an algorithm was chosen for; 64 bytes, as opaque to the caller as cuBLASLt's.
struct Algorithm {
    uint32_t magic;
    int32_t types[3];
    int32_t transposed[2];
    uint32_t alignment[3];
    uint32_t widths[3]; // of the first factor: rows, columns; depth
    uint32_t strides[3];
    uint32_t unused;
};
static_assert(sizeof(Algorithm) == 64, "an algorithm has 64 bytes");
struct Heuristic {
    Algorithm algorithm;
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};
const uint32_t MAGIC = 0x6c746d6d;

std::mutex lock;
long products = 0;

bool strikes(const char* kind, long number) {
    const char* text = getenv("EAGLET_STANDIN_FAULT");
    return text && std::string(text) == std::string(kind) + ":" + std::to_string(number);
}

bool fits(const Layout& layout) {
    return (layout.type == F32 || layout.type == BF16) && layout.rows > 0 && layout.cols > 0 &&
           layout.stride >= int64_t(layout.rows);
}

// Rows and columns after the transposition.
uint64_t rows_of(const Layout& layout, int transposed) {
    return transposed ? layout.cols : layout.rows;
}
uint64_t cols_of(const Layout& layout, int transposed) {
    return transposed ? layout.rows : layout.cols;
}

bool describes_a_product(const Desc& desc, const Layout& a, const Layout& b, const Layout& c, const Layout& d) {
    return desc.compute == COMPUTE_32F && desc.scale == F32 && fits(a) && fits(b) && fits(c) && fits(d) &&
           a.type == b.type && c.type == d.type && (c.type == F32 || a.type == BF16) && c.rows == d.rows &&
           c.cols == d.cols && rows_of(a, desc.transposed[0]) == d.rows && cols_of(b, desc.transposed[1]) == d.cols &&
           cols_of(a, desc.transposed[0]) == rows_of(b, desc.transposed[1]);
}

Algorithm describe(const Desc& desc, const Layout& a, const Layout& b, const Layout& d) {
    Algorithm algorithm = {};
    algorithm.magic = MAGIC;
    algorithm.types[0] = a.type;
    algorithm.types[1] = b.type;
    algorithm.types[2] = d.type;
    memcpy(algorithm.transposed, desc.transposed, sizeof(desc.transposed));
    algorithm.widths[0] = uint32_t(a.rows);
    algorithm.widths[1] = uint32_t(a.cols);
    algorithm.widths[2] = uint32_t(cols_of(a, desc.transposed[0]));
    algorithm.strides[0] = uint32_t(a.stride);
    algorithm.strides[1] = uint32_t(b.stride);
    algorithm.strides[2] = uint32_t(d.stride);
    return algorithm;
}

float element(const void* data, const Layout& layout, uint64_t row, uint64_t col) {
    const uint64_t place = row + col * uint64_t(layout.stride);
    if (layout.type == F32) {
        return static_cast<const float*>(data)[place];
    }
    const uint32_t bits = uint32_t(static_cast<const uint16_t*>(data)[place]) << 16;
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

void put(void* data, const Layout& layout, uint64_t row, uint64_t col, float value) {
    const uint64_t place = row + col * uint64_t(layout.stride);
    if (layout.type == F32) {
        static_cast<float*>(data)[place] = value;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    static_cast<uint16_t*>(data)[place] = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

} // namespace

#define API extern "C" __attribute__((visibility("default"))) int

API cublasLtCreate(void** handle) {
    *handle = new char;
    return SUCCESS;
}

API cublasLtDestroy(void* handle) {
    delete static_cast<char*>(handle);
    return SUCCESS;
}

API cublasLtMatrixLayoutCreate(void** layout, int type, uint64_t rows, uint64_t cols, int64_t stride) {
    *layout = new Layout{type, rows, cols, stride};
    return SUCCESS;
}

API cublasLtMatrixLayoutDestroy(void* layout) {
    delete static_cast<Layout*>(layout);
    return SUCCESS;
}

API cublasLtMatmulDescCreate(void** desc, int compute, int scale) {
    *desc = new Desc{compute, scale, {0, 0}};
    return SUCCESS;
}

API cublasLtMatmulDescDestroy(void* desc) {
    delete static_cast<Desc*>(desc);
    return SUCCESS;
}

API cublasLtMatmulDescSetAttribute(void* desc, int attribute, const void* value, size_t bytes) {
    if ((attribute != 3 && attribute != 4) || bytes != sizeof(int)) {
        return INVALID_VALUE;
    }
    int operation;
    memcpy(&operation, value, sizeof(operation));
    static_cast<Desc*>(desc)->transposed[attribute - 3] = operation;
    return operation == 0 || operation == 1 ? SUCCESS : INVALID_VALUE;
}

API cublasLtMatmulPreferenceCreate(void** preference) {
    *preference = new Preference{0, 0xffffffffu, {256, 256, 256, 256}};
    return SUCCESS;
}

API cublasLtMatmulPreferenceDestroy(void* preference) {
    delete static_cast<Preference*>(preference);
    return SUCCESS;
}

API cublasLtMatmulPreferenceSetAttribute(void* raw, int attribute, const void* value, size_t bytes) {
    Preference* preference = static_cast<Preference*>(raw);
    void* to = attribute == 1                     ? static_cast<void*>(&preference->workspace)
               : attribute == 3                   ? &preference->reduction_mask
               : attribute >= 5 && attribute <= 8 ? &preference->alignment[attribute - 5]
                                                  : nullptr;
    if (!to || bytes != (attribute == 1 ? 8u : 4u)) {
        return INVALID_VALUE;
    }
    memcpy(to, value, bytes);
    return SUCCESS;
}

API cublasLtMatmulAlgoGetHeuristic(void*, void* desc, void* a, void* b, void* c, void* d, void* preference, int wanted,
                                   Heuristic* results, int* found) {
    const Preference& wish = *static_cast<Preference*>(preference);
    const Layout &first = *static_cast<Layout*>(a), &second = *static_cast<Layout*>(b), &result = *static_cast<Layout*>(d);
    const Desc& product = *static_cast<Desc*>(desc);
    *found = 0;
    if (wanted < 1 || !describes_a_product(product, first, second, *static_cast<Layout*>(c), result)) {
        return INVALID_VALUE;
    }
    if (wish.reduction_mask != 0 || wish.workspace < WORKSPACE) {
        return NOT_SUPPORTED; // eaglet asks for whole sums
    }
    *results = Heuristic{describe(product, first, second, result), WORKSPACE, SUCCESS, 1.0f, {}};
    for (int i = 0; i < 3; ++i) {
        results->algorithm.alignment[i] = wish.alignment[i];
    }
    *found = 1;
    return SUCCESS;
}

API cublasLtMatmul(void*, void* desc, const void* alpha, const void* a, void* a_layout, const void* b, void* b_layout,
                   const void* beta, const void* c, void* c_layout, void* d, void* d_layout, const Algorithm* algorithm,
                   void* workspace, size_t workspace_bytes, void*) {
    std::lock_guard<std::mutex> guard(lock);
    if (strikes("product", ++products)) {
        return EXECUTION_FAILED;
    }
    const Desc& product = *static_cast<Desc*>(desc);
    const Layout &first = *static_cast<Layout*>(a_layout), &second = *static_cast<Layout*>(b_layout);
    const Layout &before = *static_cast<Layout*>(c_layout), &result = *static_cast<Layout*>(d_layout);
    if (!describes_a_product(product, first, second, before, result)) {
        return INVALID_VALUE;
    }
    Algorithm expected = describe(product, first, second, result);
    memcpy(expected.alignment, algorithm->alignment, sizeof(expected.alignment));
    const int outputs = product.transposed[0] ? 1 : 0; // the side of the first factor that the sum is not over
    if (expected.widths[outputs] < algorithm->widths[outputs]) {
        if (expected.widths[2] == CHOOSY_DEPTH) {
            return NOT_SUPPORTED;
        }
        expected.widths[outputs] = algorithm->widths[outputs];
    }
    const void* addresses[3] = {a, b, d};
    for (int i = 0; i < 3; ++i) {
        if (algorithm->alignment[i] == 0 || reinterpret_cast<uintptr_t>(addresses[i]) % algorithm->alignment[i] != 0) {
            fprintf(stderr, "stand-in cuBLASLt: an operand is not aligned as its algorithm was chosen for\n");
            return INVALID_VALUE;
        }
    }
    if (memcmp(&expected, algorithm, sizeof(expected)) != 0) {
        fprintf(stderr, "stand-in cuBLASLt: an algorithm is used for another product than it was chosen for\n");
        return INVALID_VALUE;
    }
    if (workspace_bytes < WORKSPACE || reinterpret_cast<uintptr_t>(workspace) % 256 != 0) {
        return INVALID_VALUE;
    }
    memset(workspace, 0x7f, WORKSPACE); // whoever keeps something there loses it
    float factor, keep;
    memcpy(&factor, alpha, sizeof(factor));
    memcpy(&keep, beta, sizeof(keep));
    const uint64_t depth = cols_of(first, product.transposed[0]);
    for (uint64_t col = 0; col < result.cols; ++col) {
        for (uint64_t row = 0; row < result.rows; ++row) {
            float sum = 0.0f;
            for (uint64_t p = 0; p < depth; ++p) {
                const float x = product.transposed[0] ? element(a, first, p, row) : element(a, first, row, p);
                const float y = product.transposed[1] ? element(b, second, col, p) : element(b, second, p, col);
                sum += x * y;
            }
            // Without a factor for it, what was there before is not read: it may be no number.
            const float old = keep == 0.0f ? 0.0f : keep * element(c, before, row, col);
            put(d, result, row, col, factor * sum + old);
        }
    }
    return SUCCESS;
}
