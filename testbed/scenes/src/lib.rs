//! Seeded scenes with ground truth: moving objects over textured backgrounds under controlled light.
