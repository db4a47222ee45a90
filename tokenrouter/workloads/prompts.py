"""Our own short prompts: prose, code, numbers, dialogue, several languages and scripts."""

DEFAULT_PROMPTS = (
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Explain to a ten-year-old why the sky is blue and sunsets are red.",
    "def binary_search(items: list[int], target: int) -> int:\n    low, high = 0, len(items) - 1\n",
    "A train leaves at 14:35 and arrives at 17:12. How many minutes does the trip take?",
    "Summarise these minutes in three points: the budget was approved, the roof will be mended in "
    "May, and the library will open on Sundays.",
    "请用三句话介绍一下北京的历史。",
    "SELECT name, COUNT(*) AS orders FROM customers JOIN orders ON orders.buyer = customers.id\n",
    "Übersetze ins Englische: Der frühe Vogel fängt den Wurm, die zweite Maus bekommt den Käse.",
    "The results were as follows: 12.5 %, 37.25 %, 0.003 and -41. Their sum is",
    "Dear Ms. Okafor,\n\nThank you for your letter of 3 March about the delayed delivery of",
    "La photosynthèse est le processus par lequel les plantes",
    "Q: What is the capital of Australia?\nA: Canberra.\nQ: Which river flows through Vienna?\nA:",
    "Ingredients: 200 g flour, 2 eggs, 350 ml milk, a pinch of salt.\nMethod:\n1.",
    "日本の四季について、それぞれの特徴を説明してください。",
    '{"name": "sensor-7", "readings": [21.4, 21.9, 22.3], "unit": "C", "status":',
    "Напишите короткое стихотворение о зимнем лесе.",
    "import numpy as np\n\nclass KalmanFilter:\n    '''One-dimensional.'''\n\n    def update(self,",
    "The emoji 🙂 🚀 🌧️ tell a small story:",
    "In 1969 Neil Armstrong, Buzz Aldrin and Michael Collins flew to the Moon. Collins",
    "Escribe un correo breve para pedir cita con el dentista el próximo martes por la tarde.",
    "Theorem. There are infinitely many primes.\nProof. Suppose there were only finitely many,",
    "Compare tea and coffee: taste, caffeine, price, and how they are prepared.",
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 1; i <= 100; i++) {\n",
    "أخبرني عن أهمية الماء في حياة الإنسان.",
)

CODE_PROMPTS = tuple(
    prompt
    for prompt in DEFAULT_PROMPTS
    if prompt.startswith(("def ", "SELECT ", "{", "import ", "#include "))
)
