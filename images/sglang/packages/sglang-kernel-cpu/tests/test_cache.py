"""Cache bookkeeping on examples small enough to read."""

import unittest

import torch

import sgl_kernel

ROWS = torch.tensor([2, 0])


def table():
    """Pool of 3 requests and 8 positions: slot = 100 * row + position."""
    return (torch.arange(3)[:, None] * 100 + torch.arange(8)[None]).int()


class Locations(unittest.TestCase):
    start, end = torch.tensor([1, 3]), torch.tensor([4, 5])

    def test_slots_go_into_the_pool(self):
        pool, slots = table(), torch.tensor([7, 8, 9, 10, 11])
        sgl_kernel.assign_req_to_token_pool_cpu(ROWS, pool, self.start, self.end, slots, 8)
        expected = table()
        expected[2, 1:4], expected[0, 3:5] = torch.tensor([7, 8, 9]), torch.tensor([10, 11])
        torch.testing.assert_close(pool, expected)

    def test_slots_come_out_of_the_pool(self):
        slots = torch.zeros(5, dtype=torch.int64)
        sgl_kernel.assign_extend_cache_locs_cpu(ROWS, table(), self.start, self.end, slots, 8)
        self.assertEqual(slots.tolist(), [201, 202, 203, 3, 4])

    def test_drafts_lie_behind_the_sequence(self):
        slots = torch.zeros(8, dtype=torch.int64)
        sgl_kernel.assign_draft_cache_locs_contiguous_cpu(ROWS, table(), torch.tensor([3, 1]), slots, 8, 2, 2)
        self.assertEqual(slots.tolist(), [203, 204, 205, 206, 1, 2, 3, 4])

    def test_every_branch_of_a_draft_is_a_sequence(self):
        rows = sgl_kernel.build_draft_decode_metadata_cpu(table(), ROWS, torch.tensor([3, 1]), 2, 2, 8)
        self.assertEqual(
            [row[:5].tolist() for row in rows],
            [[200, 201, 202, 203, 204], [200, 201, 202, 205, 206], [0, 1, 2, 0, 0], [0, 3, 4, 0, 0]],
        )
        self.assertEqual((rows.shape, rows.dtype), ((4, 8), torch.int32))


class Rows(unittest.TestCase):
    def test_all_rows_are_read_before_any_is_written(self):
        buffers = [torch.arange(12, dtype=torch.float32).view(4, 3), torch.arange(8, dtype=torch.int64).view(4, 2)]
        before = [buffer.clone() for buffer in buffers]
        sgl_kernel.copy_all_layer_kv_cache_cpu(
            torch.tensor([b.data_ptr() for b in buffers]),
            torch.tensor([12, 16]),
            torch.tensor([1, 2]),
            torch.tensor([0, 1]),
        )
        for buffer, old in zip(buffers, before, strict=True):
            torch.testing.assert_close(buffer, old[[0, 0, 1, 3]])


class Tokens(unittest.TestCase):
    def test_bonus_token_is_the_last_accepted(self):
        tokens, bonus = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8]), torch.zeros(2, dtype=torch.int64)
        sgl_kernel.fill_bonus_tokens_cpu(tokens, torch.tensor([1, 3], dtype=torch.int32), bonus, 4)
        self.assertEqual(bonus.tolist(), [1, 7])

    def test_accepted_slots_are_packed(self):
        out = torch.zeros(4, dtype=torch.int64)
        accepted = torch.tensor([[0, 2, -1], [3, -1, -1]], dtype=torch.int32)
        sgl_kernel.fill_accept_out_cache_loc_cpu(accepted, torch.tensor([10, 11, 12, 13]), out)
        self.assertEqual(out.tolist(), [10, 12, 13, 0])

    def test_ids_are_shifted_within_each_request(self):
        ids = torch.tensor([1, 2, 3, 4, 5, 6])
        start, lengths, new = torch.tensor([0, 3, 3]), torch.tensor([3, 0, 2]), torch.tensor([[70], [80], [90]])
        sgl_kernel.rotate_input_ids_cpu(ids, start, lengths, new)
        self.assertEqual(ids.tolist(), [2, 3, 70, 5, 90, 6])

    def test_the_new_token_can_go_elsewhere(self):
        ids = torch.tensor([1, 2, 3, 4])
        sgl_kernel.rotate_input_ids_cpu(ids, torch.tensor([0]), torch.tensor([4]), torch.tensor([9]), torch.tensor([1]))
        self.assertEqual(ids.tolist(), [2, 9, 4, 4])


class Package(unittest.TestCase):
    def test_says_that_it_is_not_the_cuda_package(self):
        self.assertEqual(sgl_kernel.__version__, "0.4.10+cpu")
        self.assertIs(sgl_kernel.RUNS_WITHOUT_AMX, True)
        self.assertFalse(hasattr(torch.ops.sgl_kernel, "convert_weight_packed"), "SGLang would take the AMX paths")


if __name__ == "__main__":
    unittest.main()
