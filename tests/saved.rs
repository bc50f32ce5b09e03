//! The chain of saved-tensor links.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use memfit::Error;
use memfit::saved::{Link, is_parameter, pause, register};
use memfit::state::Named;
use tch::{Device, Kind, Tensor};

fn cpu() -> (Kind, Device) {
    (Kind::Double, Device::Cpu)
}

/// A link that takes every tensor and counts packs and unpacks.
fn counting() -> (Link, Arc<[AtomicUsize; 2]>) {
    let counts = Arc::new([AtomicUsize::new(0), AtomicUsize::new(0)]);
    let seen = counts.clone();
    let link = Link::new(move |tensor| {
        seen[0].fetch_add(1, Ordering::Relaxed);
        let (copy, seen) = (tensor.copy(), seen.clone());
        Ok(Some(Box::new(move || {
            seen[1].fetch_add(1, Ordering::Relaxed);
            Ok(copy.shallow_clone())
        })))
    });
    (link, counts)
}

fn counts(of: &[AtomicUsize; 2]) -> (usize, usize) {
    (of[0].load(Ordering::Relaxed), of[1].load(Ordering::Relaxed))
}

fn backward(y: &Tensor) -> memfit::Result<()> {
    y.f_backward().map_err(Error::from)
}

#[test]
fn a_link_that_copies_leaves_gradients_equal() {
    let _guard = support::serial();
    let mut x = Tensor::randn([3, 4], cpu()).set_requires_grad(true);
    let y = (&x * 2.0).tanh().sin();
    y.sum(Kind::Double).backward();
    let plain = x.grad().copy();
    x.zero_grad();

    let (link, count) = counting();
    let chain = link.push();
    let y = (&x * 2.0).tanh().sin();
    drop(chain);
    y.sum(Kind::Double).backward();
    assert_eq!(x.grad(), plain);
    assert_eq!(counts(&count), (2, 2));
}

#[test]
fn the_innermost_link_is_asked_first_and_what_it_declines_goes_outward() {
    let _guard = support::serial();
    let (outer, outer_count) = counting();
    let (inner, inner_count) = counting();
    let decline = Link::new(|_| Ok(None));
    let x = Tensor::ones([3], cpu()).set_requires_grad(true);

    let outermost = outer.push();
    let declining = decline.push();
    let a = (&x * 2.0).tanh();
    let innermost = inner.push();
    let b = (&x * 3.0).tanh();
    // Guards may be dropped in any order.
    drop(outermost);
    drop(declining);
    let c = (&x * 4.0).tanh();
    drop(innermost);
    let d = (&x * 5.0).tanh();
    assert_eq!(counts(&outer_count).0, 1);
    assert_eq!(counts(&inner_count).0, 2);
    (a + b + c + d).sum(Kind::Double).backward();
    let right: f64 = [2.0f64, 3.0, 4.0, 5.0].iter().map(|k| k * (1.0 - k.tanh().powi(2))).sum();
    assert!((x.grad().double_value(&[0]) - right).abs() < 1e-12);
}

#[test]
fn a_pause_hides_links_and_a_link_pushed_inside_it_is_seen() {
    let _guard = support::serial();
    let (outer, outer_count) = counting();
    let (inner, inner_count) = counting();
    let x = Tensor::ones([3], cpu()).set_requires_grad(true);
    let chain = outer.push();
    let hidden = pause();
    let _a = (&x * 2.0).tanh();
    let inside = inner.push();
    let _b = (&x * 2.0).tanh();
    drop(inside);
    drop(hidden);
    let _c = (&x * 2.0).tanh();
    drop(chain);
    assert_eq!((counts(&outer_count).0, counts(&inner_count).0), (1, 1));
}

#[test]
fn parameters_and_their_views_are_not_shown() {
    let _guard = support::serial();
    let (link, count) = counting();
    let x = Tensor::randn([2, 3], cpu()).set_requires_grad(true);
    let w = Tensor::randn([4, 3], cpu()).set_requires_grad(true);
    let frozen = Tensor::randn([4, 4], cpu());
    assert!(is_parameter(&w) && is_parameter(&w.tr()) && !is_parameter(&frozen));
    let registration = register(&[Named::new("frozen", &frozen)]).unwrap();
    assert!(is_parameter(&frozen.tr()));

    let chain = link.push();
    // mm saves the leaf x and the view of w; the second mm saves only the view of frozen.
    let _y = x.matmul(&w.tr()).matmul(&frozen.tr());
    drop(chain);
    assert_eq!(counts(&count), (0, 0));
    drop(registration);
    assert!(!is_parameter(&frozen));
}

/// Case 29.
#[test]
fn a_tensor_kept_by_reference_and_changed_in_place_is_an_error_that_names_it() {
    let _guard = support::serial();
    let w = Tensor::randn([4, 3], cpu()).set_requires_grad(true);
    let x = Tensor::randn([2, 3], cpu()).set_requires_grad(true);
    let _registration = register(&[Named::new("encoder.weight", &w)]).unwrap();
    let decline = Link::new(|_| Ok(None));

    let chain = decline.push();
    let y = x.matmul(&w.tr()).sum(Kind::Double);
    drop(chain);
    let _ = tch::no_grad(|| w.shallow_clone().fill_(1.0));
    match backward(&y) {
        Err(Error::Modified { what, expected, found }) => {
            assert_eq!(what, "`encoder.weight`");
            assert!(found > expected);
        }
        other => panic!("{other:?}"),
    }

    // An activation, with the chain and with libtorch's own check.
    for linked in [true, false] {
        let chain = linked.then(|| decline.push());
        let mut a = &x * 2.0;
        let y = a.tanh().sum(Kind::Double) + (&a * &a).sum(Kind::Double);
        drop(chain);
        let _ = tch::no_grad(|| a.fill_(0.5));
        let error = backward(&y).unwrap_err();
        assert!(matches!(error, Error::Modified { .. }), "{error:?}");
        assert!(error.to_string().contains("[2, 3]"), "{error}");
    }
}

/// Case 37.
#[test]
fn a_dropped_graph_drops_what_the_link_holds() {
    let _guard = support::serial();
    let held = Arc::new(());
    let holder = held.clone();
    let link = Link::new(move |tensor| {
        let (copy, holder) = (tensor.copy(), holder.clone());
        Ok(Some(Box::new(move || {
            let _ = &holder;
            Ok(copy.shallow_clone())
        })))
    });
    let x = Tensor::ones([3], cpu()).set_requires_grad(true);
    let chain = link.push();
    let dropped = (&x * 2.0).tanh();
    let used = (&x * 2.0).tanh();
    drop(chain);
    assert_eq!(Arc::strong_count(&held), 4);
    drop(dropped);
    assert_eq!(Arc::strong_count(&held), 3);
    used.sum(Kind::Double).backward();
    assert_eq!(Arc::strong_count(&held), 2);
    drop(link);
    assert_eq!(Arc::strong_count(&held), 1);
}

#[test]
fn errors_and_panics_in_a_link_come_back_typed_and_leave_the_chain_whole() {
    let _guard = support::serial();
    let x = Tensor::ones([3], cpu()).set_requires_grad(true);
    let refusing = Link::new(|_| Err(Error::config("link", "refuses")));
    let a = &x * 2.0;
    let chain = refusing.push();
    let error = Error::from(a.f_tanh().unwrap_err());
    assert!(matches!(error, Error::Config { setting: "link", .. }), "{error:?}");
    drop(chain);

    let panicking = Link::new(|_| Ok(Some(Box::new(|| panic!("no bytes")))));
    let caught = std::panic::catch_unwind(|| {
        let _chain = panicking.push();
        let y = (&x * 2.0).tanh();
        let error = backward(&y.sum(Kind::Double)).unwrap_err();
        assert!(error.to_string().contains("no bytes"), "{error}");
        panic!("with the guard alive");
    });
    assert!(caught.is_err());

    // The chain is empty again.
    let (link, count) = counting();
    let chain = link.push();
    let y = (&x * 2.0).tanh();
    drop(chain);
    backward(&y.sum(Kind::Double)).unwrap();
    assert_eq!(counts(&count), (1, 1));
}

#[test]
fn second_order_gradients_pass_through_a_link() {
    let _guard = support::serial();
    let second = |link: Option<&Link>| {
        let x = Tensor::full([2], 0.5, cpu()).set_requires_grad(true);
        let chain = link.map(Link::push);
        let y = (&x * 1.0).tanh().sum(Kind::Double);
        let first = Tensor::run_backward(&[&y], &[&x], true, true);
        drop(chain);
        first[0].square().sum(Kind::Double).backward();
        x.grad().copy()
    };
    let (link, _) = counting();
    assert_eq!(second(Some(&link)), second(None));
}

#[test]
fn two_threads_have_chains_of_their_own() {
    let _guard = support::serial();
    let (link, count) = counting();
    let chain = link.push();
    std::thread::spawn(|| {
        let x = Tensor::ones([3], cpu()).set_requires_grad(true);
        let _y = (&x * 2.0).tanh();
    })
    .join()
    .unwrap();
    drop(chain);
    assert_eq!(counts(&count), (0, 0));
}
