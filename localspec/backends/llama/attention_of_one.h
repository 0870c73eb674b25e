// Attention of one token, divided among threads by heads; a part of the body of ik-llama's `iqk_flash_attn_noalibi`.
//
// For one token ik-llama divides the cells of the memory among threads where their number does not divide that of the KV
// heads, and adds up what each found: other sums than for several tokens, whose rows see all cells in one go. Here one
// token's rows do too, so that its logits do not depend on how many tokens share the pass, with any number of threads up
// to that of the query heads. Several threads may then read the cells of one KV head, each for its own query heads. The
// latent attention of DeepSeek's models (keys of 576) stays as it is.

if (neq1 == 1 && neq3 == 1 && rk2 > 1 && rk2 == rv2 && nth <= neq2 && Dk < 576) {
    for (int head = ith*neq2/nth, end = (ith + 1)*neq2/nth; head < end;) {
        const int kv_head = head/rk2;
        const int n = sinks ? 1 : std::min(end, (kv_head + 1)*rk2) - head;
        if (!iqk_flash_attn_impl(int_type_k, int_type_v,
                Dk, Dv, n, nek1, nbq2, stride_k, stride_v, 0, nb1/sizeof(float),
                (const float *)((const char *)q + head*nbq2), (const char *)k + kv_head*nbk2,
                (const char *)v + kv_head*nbv2, mask, sinks ? (const float *)sinks + head : nullptr, 1,
                scale, softcap, (float *)((char *)qkv + head*nb1), nullptr, nullptr)) {
            return false;
        }
        head += n;
    }
    return true;
}
