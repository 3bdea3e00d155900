// What a GPU does around a portable plan (runtime/decode/appending.py is the same in numpy). rows.ptx is made of it:
//   nvcc -ptx -arch=compute_75 rows.cu && sed -i -e '/^\/\//d' -e 's/^\.version .*/.version 6.4/' rows.ptx
//   sed -i "1s/.*/\/\/ rows.cu: sha256 $(sha256sum rows.cu | cut -c1-64)/" rows.ptx
// Nothing in it is newer than PTX 6.4, which every driver since CUDA 10.1 compiles for its GPU.

// Parts of a mask [outer, width, cache], outer = batch x heads, of elements of `item` bytes: `before` without the slots
// from starts[b] on, and `own` [outer, width, width] over the new rows. One thread per element of the mask.
extern "C" __global__ void split_mask(const unsigned char* mask, unsigned char* before, unsigned char* own,
                                      const long long* starts, int heads, int width, int cache, int item,
                                      unsigned int hidden, long long count) {
    const long long at = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (at >= count) return;
    const int slot = at % cache;
    const long long row = at / cache;
    const long long start = starts[row / width / heads];
    const bool stale = slot >= start;
    const bool fresh = stale && slot < start + width;
    for (int part = 0; part < item; ++part) {
        const unsigned char value = mask[at * item + part];
        before[at * item + part] = stale ? (unsigned char)(hidden >> (8 * part)) : value;
        if (fresh) own[(row * width + slot - start) * item + part] = value;
    }
}

// New rows of every cache at once: table [tensors][2] of addresses of rows [batch, heads, width, words] and of caches
// [batch, heads, capacity, words], in words of 4 bytes; those of sequence b go to slot starts[b] and behind. blockIdx.y is
// the tensor, one thread per word.
extern "C" __global__ void append_rows(const unsigned long long* table, const long long* starts, int heads, int width,
                                       int capacity, int words, long long count) {
    const long long at = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (at >= count) return;
    const unsigned int* rows = (const unsigned int*)table[2 * blockIdx.y];
    unsigned int* cache = (unsigned int*)table[2 * blockIdx.y + 1];
    const long long row = at / words;
    const long long head = row / width;
    const long long start = starts[head / heads];
    if (start < 0 || start + width > capacity) return;  // the runtime refuses it before the pass
    cache[(head * capacity + start + row % width) * words + at % words] = rows[at];
}
