"""`python -m recipes.video`: train the built-in video model, in about two hours on two CPU cores, and measure it."""

from recipes import parser, print_measurements
from recipes.video.evaluation import evaluate
from recipes.video.recipe import train_builtin
from verax import builtin
from verax.train.loop import fully_sharded

arguments = parser(__doc__, "runs/video")
arguments.add_argument("--evaluate", action="store_true", help="measure the output's model, or the built-in one, only")
arguments.add_argument("--devices", type=int, default=1, help="number of devices that divide batches and weights")
options = arguments.parse_args()
trained = options.output / "model"
if not options.evaluate:
    mesh = fully_sharded(options.devices)
    train_builtin(options.output, steps=options.steps, seed=options.seed, resume=options.resume, mesh=mesh)
folder = trained if trained.is_dir() else builtin.video_model()
print_measurements(evaluate(folder))
print(f"{'measured' if options.evaluate else 'trained'}: {folder}")
