//! Experts of a mixture: each token through the gated MLPs that its router chose.
