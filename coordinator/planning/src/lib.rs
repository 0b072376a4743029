//! The pure planning core: space, search, profile, schedule, check, detect, diff, explain.
