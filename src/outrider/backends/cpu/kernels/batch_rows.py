"""The rows of a batch, written out from the spans that they belong to.

    one block of 64-bit words     spans   token ids   positions   table rows   (slots   first keys   stop keys) …
                                  query_start_loc   seq_lens

Python writes the spans and the token ids; the rest is written here, with one parenthesis for each KV group.
"""

from __future__ import annotations

from outrider.backends.cpu.kernels.compiling import Entry
from outrider.backends.cpu.kernels.jobs import word
from outrider.backends.cpu.kernels.memory import load_i32, store_i64

TABLE_ROW, START, COUNT, KEPT_FROM, SEES_TO, ANCHORED = range(6)
"""Words of a span, as in `Span`, with the number of its rows in place of their token ids."""
SPAN_WORDS = 6
TABLES, TABLE_ROWS, PAGES, PAGE_TOKENS, LOOKBACK, CAUSAL, LOWS, LOW_STRIDE = range(8)
"""Words that describe a group. TABLES: the address of its block tables, int32 [TABLE_ROWS, PAGES]. LOWS: the address of
the first valid position of table row 0, int32; LOW_STRIDE is in bytes."""
GROUP_WORDS = 8
SHARED_ARRAYS = 3
"""Number of arrays of rows that all groups share."""
GROUP_ARRAYS = 3
"""Number of arrays of rows that each group has of its own."""


def write_rows(memory, spans, rows, groups, num_groups):
    """Returns whether all rows lie within the block tables. Where they do not, the batch must not be used."""
    token_ids = memory + 8 * SPAN_WORDS * spans
    positions, table_rows = token_ids + 8 * rows, token_ids + 16 * rows
    arrays = token_ids + 8 * SHARED_ARRAYS * rows
    starts = arrays + 8 * GROUP_ARRAYS * rows * num_groups
    ends = starts + 8 * (spans + 1)
    row = 0
    store_i64(starts, 0)
    for number in range(spans):
        span = memory + 8 * SPAN_WORDS * number
        table_row, start, count = word(span, TABLE_ROW), word(span, START), word(span, COUNT)
        kept_from, sees_to, anchored = word(span, KEPT_FROM), word(span, SEES_TO), word(span, ANCHORED)
        for at in range(count):
            store_i64(positions + 8 * (row + at), start + at)
            store_i64(table_rows + 8 * (row + at), table_row)
        for group_number in range(num_groups):
            group = groups + 8 * GROUP_WORDS * group_number
            page_tokens, lookback, pages = word(group, PAGE_TOKENS), word(group, LOOKBACK), word(group, PAGES)
            if start < 0 or table_row < 0 or table_row >= word(group, TABLE_ROWS):
                return False
            if start + count > pages * page_tokens:
                return False
            low = load_i32(word(group, LOWS) + table_row * word(group, LOW_STRIDE))
            table = word(group, TABLES) + 4 * table_row * pages
            slots = arrays + 8 * (GROUP_ARRAYS * rows * group_number + row)
            for at in range(count):
                position = start + at
                slot = position % page_tokens
                # The null page is page 0: rows that are not kept write there.
                if position >= kept_from:
                    slot += load_i32(table + 4 * (position // page_tokens)) * page_tokens
                first_key = max(low, (start if anchored != 0 else position) - lookback)
                stop_key = position + 1
                if word(group, CAUSAL) == 0:
                    stop_key = max(stop_key, sees_to)
                    if anchored == 0:
                        # A window that moves with its row is as long ahead as it is behind.
                        stop_key = min(stop_key, position + lookback + 1)
                store_i64(slots + 8 * at, slot)
                store_i64(slots + 8 * (rows + at), first_key)
                store_i64(slots + 8 * (2 * rows + at), stop_key)
        row += count
        store_i64(starts + 8 * (number + 1), row)
        store_i64(ends + 8 * number, start + count)
    return True


WRITE_ROWS = Entry(write_rows, "boolean(int64, int64, int64, int64, int64)")
