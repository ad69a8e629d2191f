"""Draft trees: small ones written out by hand, random ones against the path from node to root."""

import unittest

import torch

from sgl_kernel import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu


def build(parent_list, selected, lengths, *, topk, depth, mode):
    batch, n = len(selected), len(selected[0]) + 1
    size = sum(n * (n + (length if mode == 0 else 0)) for length in lengths)
    mask, positions = torch.zeros(size, dtype=torch.bool), torch.zeros(batch * n, dtype=torch.int64)
    links = torch.full((3, batch, n), -1)
    build_tree_kernel_efficient_cpu(
        torch.tensor(parent_list), torch.tensor(selected), torch.tensor(lengths), mask, positions, *links,
        topk, depth, n, mode,
    )  # fmt: skip
    return mask, positions.view(batch, n), *links


class Build(unittest.TestCase):
    # topk 2, three steps. Drafts 0, 1 hang on the root. Step 2 extends the drafts parent_list[1] and [2] into 2, 3 and 4, 5,
    # step 3 extends parent_list[3] and [4] into 6, 7 and 8, 9. Chosen: 0, 1, 2, 5, 7, where group 3 extends draft 2.
    parent_list, selected = [[-1, 0, 1, 2, 4]], [[0, 1, 2, 5, 7]]

    def test_a_tree_written_out(self):
        mask, positions, index, child, sibling = build(self.parent_list, self.selected, [10], topk=2, depth=3, mode=1)
        self.assertEqual(positions.tolist(), [[10, 11, 11, 12, 12, 13]])
        self.assertEqual(index.tolist(), [[0, 1, 2, 3, 4, 5]])
        self.assertEqual(child.tolist(), [[1, 3, 4, 5, -1, -1]])
        self.assertEqual(sibling.tolist(), [[-1, 2, -1, -1, -1, -1]])
        self.assertEqual(
            mask.view(6, 6).int().tolist(),
            [
                [1, 0, 0, 0, 0, 0],
                [1, 1, 0, 0, 0, 0],
                [1, 0, 1, 0, 0, 0],
                [1, 1, 0, 1, 0, 0],
                [1, 0, 1, 0, 1, 0],
                [1, 1, 0, 1, 0, 1],
            ],
        )

    def test_full_mask_has_the_prefix_in_front_and_requests_one_after_the_other(self):
        parents, selected, lengths = self.parent_list * 2, self.selected * 2, [2, 3]
        full, *_ = build(parents, selected, lengths, topk=2, depth=3, mode=0)
        drafts, _, index, *_ = build(parents, selected, lengths, topk=2, depth=3, mode=1)
        first, second = full[: 6 * 8].view(6, 8), full[6 * 8 :].view(6, 9)
        self.assertTrue(first[:, :2].all() and second[:, :3].all())
        torch.testing.assert_close(torch.stack([first[:, 2:], second[:, 3:]]), drafts.view(2, 6, 6))
        self.assertEqual(index.tolist(), [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]])

    def test_a_draft_without_its_parent_is_never_reached(self):
        mask, positions, _, child, sibling = build([[-1, 0, 1]], [[1, 2]], [5], topk=2, depth=2, mode=1)
        self.assertEqual(child.tolist(), [[1, -1, -1]])
        self.assertEqual(sibling.tolist(), [[-1, -1, -1]])
        self.assertEqual(positions.tolist(), [[5, 6, 6]])
        self.assertEqual(mask.view(3, 3)[2].tolist(), [True, False, True])

    def test_bit_packing_is_refused(self):
        with self.assertRaisesRegex(NotImplementedError, "mode 2"):
            build_tree_kernel_efficient_cpu(*[torch.zeros(1)] * 8, 1, 1, 2, 2)


class Verify(unittest.TestCase):
    def verify(self, candidates, target, *, width=4):
        _, _, index, child, sibling = build(
            Build.parent_list * len(candidates), Build.selected * len(candidates), [0] * len(candidates),
            topk=2, depth=3, mode=1,
        )  # fmt: skip
        batch = len(candidates)
        predicts = torch.full((batch * 6,), -7, dtype=torch.int32)
        accepted = torch.full((batch, width), -1, dtype=torch.int32)
        count = torch.zeros(batch, dtype=torch.int32)
        verify_tree_greedy_cpu(
            predicts=predicts, accept_index=accepted, accept_token_num=count, candidates=torch.tensor(candidates),
            retrive_index=index, retrive_next_token=child, retrive_next_sibling=sibling,
            target_predict=torch.tensor(target),
        )  # fmt: skip
        return predicts.view(batch, 6).tolist(), accepted.tolist(), count.tolist()

    # Tree of Build: 0 -> 1, 2; 1 -> 3; 2 -> 4; 3 -> 5.
    tokens = (50, 11, 12, 13, 14, 15)

    def test_nothing_right_gives_the_bonus_token_only(self):
        predicts, accepted, count = self.verify([self.tokens], [[99] * 6])
        self.assertEqual((accepted, count), ([[0, -1, -1, -1]], [0]))
        self.assertEqual(predicts, [[99, -7, -7, -7, -7, -7]])

    def test_the_second_sibling_can_be_right(self):
        predicts, accepted, count = self.verify([self.tokens], [[12, 0, 14, 0, 77, 0]])
        self.assertEqual((accepted, count), ([[0, 2, 4, -1]], [2]))
        self.assertEqual(predicts, [[12, -7, 14, -7, 77, -7]])

    def test_rows_of_the_second_request_are_rows_of_the_batch(self):
        right = [11, 13, 0, 15, 0, 42]
        predicts, accepted, count = self.verify([self.tokens, self.tokens], [[99] * 6, right])
        self.assertEqual((accepted, count), ([[0, -1, -1, -1], [6, 7, 9, 11]], [0, 3]))
        self.assertEqual(predicts[1], [11, 13, -7, 15, -7, 42])

    def test_stops_at_the_width_of_the_result(self):
        _, accepted, count = self.verify([self.tokens], [[11, 13, 0, 15, 0, 42]], width=2)
        self.assertEqual((accepted, count), ([[0, 1]], [1]))


class RandomTrees(unittest.TestCase):
    """The EAGLE way to draft: each step extends topk leaves by topk drafts each."""

    def test_against_parents_kept_beside(self):
        generator = torch.Generator().manual_seed(3)
        for topk, steps, n in ((1, 3, 4), (2, 3, 6), (4, 4, 12), (3, 5, 20)):
            with self.subTest(topk=topk, steps=steps, nodes=n):
                parent_of, parent_list, alive = dict.fromkeys(range(topk)), [-1], list(range(topk))
                parent_list += alive
                drafts = topk
                for _ in range(steps - 1):
                    born = []
                    for leaf in alive:
                        born += range(drafts, drafts + topk)
                        parent_of.update(dict.fromkeys(range(drafts, drafts + topk), leaf))
                        drafts += topk
                    keep = torch.randperm(len(born), generator=generator)[:topk].tolist()
                    alive = sorted(born[i] for i in keep)
                    parent_list += alive
                closed = {s for leaf in alive[:1] for s in self._path(parent_of, leaf)}
                for s in range(drafts):  # add drafts in order, whose parents are in
                    if len(closed) < n - 1 and (parent_of[s] is None or parent_of[s] in closed):
                        closed.add(s)
                selected = sorted(closed)
                mask, positions, *_ = build([parent_list], [selected], [9], topk=topk, depth=steps, mode=1)
                nodes = len(selected) + 1
                for i, draft in enumerate(selected):
                    path = self._path(parent_of, draft)
                    seen = {0, *(selected.index(s) + 1 for s in path)}
                    row = mask.view(nodes, nodes)[i + 1]
                    self.assertEqual({j for j in range(nodes) if row[j]}, seen)
                    self.assertEqual(int(positions[0, i + 1]), 9 + len(path))

    @staticmethod
    def _path(parent_of, draft):
        path = []
        while draft is not None:
            path.append(draft)
            draft = parent_of[draft]
        return path


if __name__ == "__main__":
    unittest.main()
