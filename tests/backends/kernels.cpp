// Our kernels and ik-llama's for the same products, for tests/backends/test_native_build.py to compare.

#include "iqk_gemm_kquants.cpp"

namespace {

template <int q> std::array<mul_mat_t, IQK_MAX_NY> of_ik_llama() {
    std::array<mul_mat_t, IQK_MAX_NY> kernels = {};
    if constexpr (q == 4) { IQK_SET_MUL_MAT_FUNCTIONS(mul_mat_q4_k_r4_q8_k, kernels) }
    if constexpr (q == 5) { IQK_SET_MUL_MAT_FUNCTIONS(mul_mat_q5_k_r4_q8_k, kernels) }
    if constexpr (q == 6) { IQK_SET_MUL_MAT_FUNCTIONS(mul_mat_q6_k_r4_q8_k, kernels) }
    return kernels;
}

template <int q> std::array<mul_mat_t, IQK_MAX_NY> of_localspec() {
    std::array<mul_mat_t, IQK_MAX_NY> kernels = {};
    if constexpr (q == 4) { LOCALSPEC_SET_FUNCTIONS(q4_k_r4) }
    if constexpr (q == 5) { LOCALSPEC_SET_FUNCTIONS(q5_k_r4) }
    if constexpr (q == 6) { LOCALSPEC_SET_FUNCTIONS(q6_k_r4) }
    return kernels;
}

template <int q> mul_mat_t kernel(bool ours, int n_columns) {
    return (ours ? of_localspec<q>() : of_ik_llama<q>())[n_columns - 1];
}

}  // namespace

// n_rows x n weights of bits q (rows of row_bytes), times n_columns of column_bytes: to sums [n_columns, n_rows].
extern "C" void multiply(int q, bool ours, int n, int n_rows, const void * weights, size_t row_bytes, int n_columns,
                         const char * columns, size_t column_bytes, float * sums) {
    const DataInfo info{sums, columns, size_t(n_rows), column_bytes, 0, 1, nullptr, 0};
    const auto function = q == 4 ? kernel<4>(ours, n_columns) : q == 5 ? kernel<5>(ours, n_columns) : kernel<6>(ours, n_columns);
    function(n, weights, row_bytes, info, n_rows);
}

extern "C" void sizes(int * bytes) {
    bytes[0] = sizeof(block_q4_k_r4), bytes[1] = sizeof(block_q5_k_r4), bytes[2] = sizeof(block_q6_k_r4);
    bytes[3] = sizeof(block_q8_K);
}
