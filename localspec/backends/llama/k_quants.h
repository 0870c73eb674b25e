// Q4_K, Q5_K and Q6_K, four rows interleaved, times up to eight columns of Q8_K, on x86.
//
// `localspec engine build` compiles this into ik-llama, whose kernels for these types wait for the memory that they
// read. They ask for it in time now. With AVX-512 and VNNI they give way to those below: ik-llama's take one block of
// 32 quants at a time, in registers of 256 bits, and these take two.
//
// Sums of integers are exact in any order, and sums of floats keep ik-llama's, so that every result is the same to the
// bit (tests/backends/kernels.cpp). One exception: what ik-llama computes otherwise for one column than for several is
// computed here as for several, so that a token's logits do not depend on how many are verified beside it.
//
// A weight is d * scale * quant - m * min (Q6_K: d * scale * (quant - 32)); `scale` and `min` belong to a block, d and
// m to eight blocks. In a register, each lane of 128 bits holds four quants of each row or a 32-bit number of each
// row. Blocks that follow each other are in the halves of a register of 512 bits.

#pragma once

namespace localspec {

// How far ahead memory is asked for [bytes]. On an EPYC with AVX-512, 4,608 to 18,432 are equally fast.
constexpr size_t AHEAD = 8192;

template <typename Block> inline void prefetch(const Block & block) {
    for (size_t line = 0; line < sizeof(Block); line += 64) {
        _mm_prefetch((const char *)&block + AHEAD + line, _MM_HINT_T0);
    }
}

}  // namespace localspec

#ifdef HAVE_FANCY_SIMD

namespace localspec {

inline __m256i load32(const void * bytes) { return _mm256_loadu_si256((const __m256i *)bytes); }

// The same 32 of the 64 bytes of each of two blocks.
inline __m512i of_two_blocks(const uint8_t * bytes) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(load32(bytes)), load32(bytes + 64), 1);
}

inline __m256 of_rows(const ggml_half * values) {  // one of each of four rows, in both lanes
    const auto four = _mm_cvtph_ps(_mm_loadl_epi64((const __m128i *)values));
    return _mm256_set_m128(four, four);
}

inline void unpack(const block_q4_k_r4 & block, int i, __m512i * quants) {
    const auto low = _mm512_set1_epi8(0x0f);
    const auto first = of_two_blocks(block.qs + 128*i), second = of_two_blocks(block.qs + 128*i + 32);
    quants[0] = _mm512_and_si512(first, low);
    quants[1] = _mm512_and_si512(second, low);
    quants[2] = _mm512_and_si512(_mm512_srli_epi16(first, 4), low);
    quants[3] = _mm512_and_si512(_mm512_srli_epi16(second, 4), low);
}

inline void unpack(const block_q5_k_r4 & block, int i, __m512i * quants) {
    const auto low = _mm512_set1_epi8(0x0f), fifth = _mm512_set1_epi8(0x10);
    const auto first = of_two_blocks(block.qs + 128*i), second = of_two_blocks(block.qs + 128*i + 32);
    // The fifth bits of a block are 16 bytes, which the lower half of it needs four bits higher than the upper one.
    auto bits = _mm512_castsi256_si512(load32(block.qh + 32*i));
    bits = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3), bits);
    bits = _mm512_mask_slli_epi16(bits, 0x00ff00ff, bits, 4);
    const auto with = [low, fifth] (__m512i four, __m512i one) {
        return _mm512_or_si512(_mm512_and_si512(four, low), _mm512_and_si512(one, fifth));
    };
    quants[0] = with(first, bits);
    quants[1] = with(second, _mm512_srli_epi16(bits, 2));
    quants[2] = with(_mm512_srli_epi16(first, 4), _mm512_srli_epi16(bits, 1));
    quants[3] = with(_mm512_srli_epi16(second, 4), _mm512_srli_epi16(bits, 3));
}

inline void unpack(const block_q6_k_r4 & block, int i, __m512i * quants) {
    const auto low = _mm512_set1_epi8(0x0f), upper = _mm512_set1_epi8(0x30);
    const auto first = of_two_blocks(block.ql + 128*i), second = of_two_blocks(block.ql + 128*i + 32);
    const auto bits = _mm512_loadu_si512(block.qh + 64*i);
    const auto with = [low, upper] (__m512i four, __m512i two) {
        return _mm512_or_si512(_mm512_and_si512(four, low), _mm512_and_si512(two, upper));
    };
    quants[0] = with(first, _mm512_slli_epi16(bits, 4));
    quants[1] = with(second, bits);
    quants[2] = with(_mm512_srli_epi16(first, 4), _mm512_slli_epi16(bits, 2));
    quants[3] = with(_mm512_srli_epi16(second, 4), _mm512_srli_epi16(bits, 2));
}

// What comes before the products of eight blocks: their scales, two blocks in 16 bytes, and the part of `min`.
template <typename Block, int n_columns>
inline void begin(const Block & block, int ibl, const Q8<n_columns, block_q8_K> & q8, int8_t * scales, __m256 * sums,
                  __m512i * products) {
    const auto low = _mm256_set1_epi8(0x0f), upper = _mm256_set1_epi8(0x30);
    const auto four = load32(block.scales_l);
    const auto bits = _mm_loadu_si128((const __m128i *)block.scales_h);
    const auto two = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_slli_epi16(bits, 4)), bits, 1);
    const auto with = [low, upper] (__m256i four, __m256i two) {
        return _mm256_or_si256(_mm256_and_si256(four, low), _mm256_and_si256(two, upper));
    };
    // Of the upper lane's blocks, four later, the sum of a column is in the upper lane too.
    auto mins = with(_mm256_srli_epi16(four, 4), _mm256_srli_epi16(two, 2));
    mins = _mm256_permutevar8x32_epi32(mins, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    const auto m = _mm256_mul_ps(_mm256_set1_ps(-1.0f), of_rows(block.d + 4));
    const auto times = [m] (__m128i mins) { return _mm256_mul_ps(m, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(mins))); };
    const auto first = _mm256_castsi256_si128(mins), second = _mm256_extracti128_si256(mins, 1);
    const __m256 blocks[4] = {times(first), times(_mm_unpackhi_epi64(first, first)),
                              times(second), times(_mm_unpackhi_epi64(second, second))};
    for (int iy = 0; iy < n_columns; ++iy) {
        const auto of_column = _mm256_loadu_ps((const float *)q8.y[iy][ibl].bsums);
        sums[iy] = _mm256_fmadd_ps(blocks[0], _mm256_permute_ps(of_column, 0x00), sums[iy]);
        sums[iy] = _mm256_fmadd_ps(blocks[1], _mm256_permute_ps(of_column, 0x55), sums[iy]);
        sums[iy] = _mm256_fmadd_ps(blocks[2], _mm256_permute_ps(of_column, 0xaa), sums[iy]);
        sums[iy] = _mm256_fmadd_ps(blocks[3], _mm256_permute_ps(of_column, 0xff), sums[iy]);
    }
    const auto each_twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const auto packed = _mm512_castsi256_si512(with(four, two));
    _mm512_storeu_si512(scales, _mm512_permutexvar_epi32(each_twice, packed));
    for (int iy = 0; iy < n_columns; ++iy) products[iy] = _mm512_setzero_si512();
}

// Q6_K has a scale for each half of a block; its part of -32 times the sums of 16 values is one of integers.
template <int n_columns>
inline void begin(const block_q6_k_r4 & block, int ibl, const Q8<n_columns, block_q8_K> & q8, int8_t * scales, __m256 *,
                  __m512i * products) {
    auto bytes = _mm512_loadu_si512(block.scales);
    _mm512_storeu_si512(scales, bytes);
    // Of each row the two scales of a block beside each other; then blocks 0 and 4, 1 and 5, 2 and 6, 3 and 7.
    const auto by_row = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    bytes = _mm512_shuffle_epi8(bytes, _mm512_broadcast_i32x4(by_row));
    bytes = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), bytes);
    const auto times = [] (__m128i scales) { return _mm256_slli_epi16(_mm256_cvtepi8_epi16(scales), 5); };
    const __m256i blocks[4] = {times(_mm512_castsi512_si128(bytes)), times(_mm512_extracti32x4_epi32(bytes, 1)),
                               times(_mm512_extracti32x4_epi32(bytes, 2)), times(_mm512_extracti32x4_epi32(bytes, 3))};
    for (int iy = 0; iy < n_columns; ++iy) {
        const auto sums = q8.load_bsums(iy, ibl);
        auto sum = _mm256_dpwssd_epi32(_mm256_setzero_si256(), blocks[0], _mm256_shuffle_epi32(sums, 0x00));
        sum = _mm256_dpwssd_epi32(sum, blocks[1], _mm256_shuffle_epi32(sums, 0x55));
        sum = _mm256_dpwssd_epi32(sum, blocks[2], _mm256_shuffle_epi32(sums, 0xaa));
        sum = _mm256_dpwssd_epi32(sum, blocks[3], _mm256_shuffle_epi32(sums, 0xff));
        products[iy] = _mm512_zextsi256_si512(_mm256_sub_epi32(_mm256_setzero_si256(), sum));
    }
}

inline __m512i product(const __m512i * quants, __m512i column) {
    auto sum = _mm512_setzero_si512();
    sum = _mm512_dpbusd_epi32(sum, quants[0], _mm512_shuffle_epi32(column, _MM_PERM_ENUM(0x00)));
    sum = _mm512_dpbusd_epi32(sum, quants[1], _mm512_shuffle_epi32(column, _MM_PERM_ENUM(0x55)));
    sum = _mm512_dpbusd_epi32(sum, quants[2], _mm512_shuffle_epi32(column, _MM_PERM_ENUM(0xaa)));
    return _mm512_dpbusd_epi32(sum, quants[3], _mm512_shuffle_epi32(column, _MM_PERM_ENUM(0xff)));
}

// A mul_mat_t of ik-llama: n values a row, rows of bx bytes from vx on, n_rows of them.
template <typename Block, int n_columns>
void mul_mat(int n, const void * vx, size_t bx, const DataInfo & info, int n_rows) {
    const Q8<n_columns, block_q8_K> q8(info);
    alignas(64) int8_t scales[64];
    for (int ix = 0; ix < n_rows; ix += 4) {
        const auto blocks = (const Block *)((const char *)vx + ix*bx);
        __m256 sums[n_columns] = {};
        for (int ibl = 0; ibl < n/QK_K; ++ibl) {
            const auto & block = blocks[ibl];
            prefetch(block);
            __m512i products[n_columns];
            begin(block, ibl, q8, scales, sums, products);
            for (int i = 0; i < QK_K/64; ++i) {
                __m512i quants[4];
                unpack(block, i, quants);
                const auto scale = _mm512_cvtepi8_epi32(_mm_load_si128((const __m128i *)scales + i));
                for (int iy = 0; iy < n_columns; ++iy) {
                    const auto column = _mm512_loadu_si512(q8.y[iy][ibl].qs + 64*i);
                    products[iy] = _mm512_add_epi32(products[iy], _mm512_mullo_epi32(scale, product(quants, column)));
                }
            }
            const auto d = of_rows(block.d);
            for (int iy = 0; iy < n_columns; ++iy) {
                const auto first = _mm512_castsi512_si256(products[iy]);
                const auto whole = _mm256_add_epi32(first, _mm512_extracti64x4_epi64(products[iy], 1));
                const auto d_both = _mm256_mul_ps(d, _mm256_set1_ps(q8.scale(iy, ibl)));
                sums[iy] = _mm256_fmadd_ps(d_both, _mm256_cvtepi32_ps(whole), sums[iy]);
            }
        }
        for (int iy = 0; iy < n_columns; ++iy) {
            info.store(ix, iy, _mm_add_ps(_mm256_castps256_ps128(sums[iy]), _mm256_extractf128_ps(sums[iy], 1)));
        }
    }
}

template <typename Block> void set_functions(std::array<mul_mat_t, IQK_MAX_NY> & kernels) {
    kernels = {mul_mat<Block, 1>, mul_mat<Block, 2>, mul_mat<Block, 3>, mul_mat<Block, 4>,
               mul_mat<Block, 5>, mul_mat<Block, 6>, mul_mat<Block, 7>, mul_mat<Block, 8>};
}

}  // namespace localspec

#define LOCALSPEC_SET_FUNCTIONS(type) localspec::set_functions<block_##type>(kernels);

#else

#define LOCALSPEC_SET_FUNCTIONS(type) IQK_SET_MUL_MAT_FUNCTIONS(mul_mat_##type##_q8_k, kernels)

#endif
