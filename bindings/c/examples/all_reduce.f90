! Computes pi by all ranks of a job, and gathers the part of each.
!
!     gfortran all_reduce.f90 $(pkg-config --cflags --libs fabricast-fortran)
!     mpirun -n 4 ./a.out
program all_reduce
    use, intrinsic :: iso_fortran_env, only: int32, int64, real64
    use fabricast
    use fabricast_collective
    implicit none

    integer, parameter :: STEPS = 1000000
    type(fabricast_domain) :: domain
    integer(int64) :: timeout
    integer(int32) :: rank, ranks
    integer :: step
    real(real64) :: x, own(1), total(1)
    real(real64), allocatable :: parts(:)

    timeout = fabricast_seconds(30)
    ! The ranks of mpirun, srun or torchrun; without a launcher there is one.
    call check(fabricast_domain_join_launched(domain))
    call check(fabricast_domain_rank(domain, rank))
    call check(fabricast_domain_size(domain, ranks))

    own = 0
    do step = rank, STEPS - 1, ranks
        x = (step + 0.5_real64) / STEPS
        own(1) = own(1) + 4 / (1 + x * x) / STEPS
    end do
    total = own
    call check(fabricast_domain_all_reduce(domain, total, FABRICAST_REDUCE_SUM, timeout))

    allocate (parts(merge(ranks, 0, rank == 0)))
    call check(fabricast_domain_gather(domain, own, parts, 0, timeout))
    if (rank == 0) then
        if (abs(sum(parts) - total(1)) > 1e-12_real64) error stop 'the parts are not the sum'
        if (abs(total(1) - acos(-1.0_real64)) > 1e-9_real64) error stop 'this is not pi'
        print '(a, f12.10, a, i0, a)', 'pi is ', total, ' by ', ranks, ' ranks: ok'
    end if
    call check(fabricast_domain_close(domain, timeout))

contains

    subroutine check(status)
        integer(int32), intent(in) :: status
        if (status == FABRICAST_OK) return
        print '(a)', fabricast_message()
        error stop 1
    end subroutine
end program
