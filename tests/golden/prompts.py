"""The prompts of the SmolLM2 goldens."""

CHAT_QUESTION = "Why is the sky blue during the day but red at sunset?"

PYTHON = '''import heapq


def shortest_paths(graph, source):
    """Dijkstra: distance from source to every reachable node."""
    distance = {source: 0}
    queue = [(0, source)]
    while queue:
        d, node = heapq.heappop(queue)
        if d > distance[node]:
            continue
        for neighbour, weight in graph[node].items():
'''

KOREAN = "서울은 대한민국의 수도이며 한강을 끼고 있는 도시이다. 오늘 날씨는 맑고 바람이 분다."

TABLE = """| year | apples | pears | total |
|------|--------|-------|-------|
| 2019 | 120 | 45 | 165 |
| 2020 | 131 | 52 | 183 |
| 2021 | 142 | 59 | 201 |
| 2022 | 153 | 66 | 219 |
| 2023 |"""

PASSAGE = """The lighthouse at the end of the harbour had been dark for eleven years when the \
council decided to sell it. Nobody in the town expected a buyer, because the road that led to it \
was washed away each winter, and because the last keeper had left behind a room full of clocks, \
all of them stopped at different hours. Yet in the spring a woman arrived with two trunks, a \
telescope and a letter from the ministry. She said that she had come to measure the tide. Every \
morning she walked down the iron stairs, wrote a number in a green notebook, and walked up again. \
The children followed her at first, then lost interest, and finally began to help. By the autumn \
they could read the marks on the stone as well as she could, and they argued about the wind and \
the moon as their parents argued about the price of fish. When the first storm of the year came, \
it was the children who saw that the water was higher than it should have been, and it was the \
children who ran from door to door to tell people to leave the lower street. The woman stayed in \
the tower and wound the clocks, one after another, until all of them showed the same hour. Then \
she lit the lamp. In the morning, when the water had gone back, there was a \
letter at the door of the tower. It said:"""
