"""For engines of multimodal models where torch has no torchvision: what vLLM imports of it, and never calls.

vLLM's classes of such models import `torchvision.transforms` (0.31), which is not to be had for a CPU's torch here. The
package itself stays absent: transformers looks for it, and takes its processors without it.
"""

import sys
import types


def _stand_in(name: str) -> types.ModuleType:
    module = types.ModuleType(name)

    def attribute(wanted: str) -> object:
        if wanted.startswith("__"):
            raise AttributeError(wanted)

        def missing(*_: object, **__: object) -> None:
            raise RuntimeError(f"{name}.{wanted} is called, and torchvision is not installed")

        return missing

    module.__dict__["__getattr__"] = attribute
    sys.modules[name] = module
    return module


transforms = _stand_in("torchvision.transforms")
v2 = _stand_in("torchvision.transforms.v2")
v2.__dict__["functional"] = _stand_in("torchvision.transforms.v2.functional")
transforms.__dict__["v2"] = v2
for module in (transforms, v2):
    module.__dict__["InterpolationMode"] = type("InterpolationMode", (), {})
